"""Policy gradients of what a teacher says of each token."""
