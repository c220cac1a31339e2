"""All pairs of what a table can be, with an oracle that shares no code with what it judges."""
