"""Model families beyond TorchTitan's own."""
