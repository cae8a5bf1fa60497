"""The sharded model of a rank: layout, optimizer."""
