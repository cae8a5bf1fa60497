"""The sharded model of a rank: layout, memory, optimizer."""
