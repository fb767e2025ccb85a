"""What a run will take, before it starts: memory, disk, bytes sent, time. `tether check` shows it."""
