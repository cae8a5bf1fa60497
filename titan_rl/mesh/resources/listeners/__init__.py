"""Sockets that listen, and who may connect to them."""
