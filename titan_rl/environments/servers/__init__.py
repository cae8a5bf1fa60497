"""Environments of other people's that are asked over a network, as they are: by address, under deadlines."""
