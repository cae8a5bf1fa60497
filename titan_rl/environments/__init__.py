"""What is asked, how it is answered, and how the answer is scored."""
