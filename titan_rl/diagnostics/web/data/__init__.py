"""What the watch page reads from run directories."""
