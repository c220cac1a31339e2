"""What people touch: commands, their text, and the exit code of every end."""
