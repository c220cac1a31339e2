"""The command line: commands, their output for people and scripts, and their exit codes."""
