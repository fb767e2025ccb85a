"""Devices by name: what their makers' data sheets say. No number here was measured."""

from dataclasses import dataclass

NVIDIA = "NVIDIA's data sheet"
AMD = "AMD's data sheet"


@dataclass(frozen=True)
class Device:
    """Peaks of a device, in units of 1e9 bytes and 1e12 operations per second, dense."""

    memory_gigabytes: float
    bfloat16_teraflops: float
    float32_teraflops: float  # plain, as tether computes it: without TF32
    bandwidth_gigabytes: float  # of its memory
    link_gigabytes: float  # to other devices of the machine, in one direction
    source: str


DEVICES = {
    "a100-40gb": Device(40, 312, 19.5, 1555, 300, f"{NVIDIA}, A100 SXM"),
    "a100-80gb": Device(80, 312, 19.5, 2039, 300, f"{NVIDIA}, A100 SXM"),
    "h100-80gb": Device(80, 989, 67, 3350, 450, f"{NVIDIA}, H100 SXM"),
    "h200-141gb": Device(141, 989, 67, 4800, 450, f"{NVIDIA}, H200 SXM"),
    "l4-24gb": Device(24, 121, 30.3, 300, 32, f"{NVIDIA}, L4; PCIe 4.0 x16"),
    "l40s-48gb": Device(48, 362, 91.6, 864, 32, f"{NVIDIA}, L40S; PCIe 4.0 x16"),
    "rtx4090-24gb": Device(24, 165, 82.6, 1008, 32, f"{NVIDIA}, RTX 4090; PCIe 4.0 x16"),
    "mi300x-192gb": Device(192, 1307, 163.4, 5300, 448, f"{AMD}, MI300X"),
}
# What of a peak is usual. Training reaches 35 to 50% of a device's products, decoding 60 to 80% of
# its memory's bandwidth; nothing of tether's was measured on a GPU.
REACHED_PRODUCTS = 0.4
REACHED_BYTES = 0.7
