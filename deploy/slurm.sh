#!/bin/bash
#SBATCH --job-name=tether
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=TERM@300

# Nodes often have several networks: name the one that both libraries shall use (ip -br addr).
export GLOO_SOCKET_IFNAME=${TETHER_INTERFACE:-ib0}
export NCCL_SOCKET_IFNAME=$GLOO_SOCKET_IFNAME

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
run=/shared/runs/$SLURM_JOB_ID

srun torchrun \
  --nnodes "$SLURM_NNODES" --nproc-per-node 8 \
  --rdzv-backend c10d --rdzv-endpoint "$head:29500" --rdzv-id "$SLURM_JOB_ID" \
  --max-restarts 2 --shutdown-timeout 240 \
  -m tether train mine.yaml --launch.weights sharded --resume --run.dir "$run"
