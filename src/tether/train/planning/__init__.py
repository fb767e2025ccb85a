"""What a run will take, before it starts: memory, disk, bytes sent, time; see `tether check`."""
