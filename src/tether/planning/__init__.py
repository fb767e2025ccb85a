"""What a run will take: operations, memory, disk, time."""
