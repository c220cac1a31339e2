"""The supervisor's state: tables and runs in memory, the run history, the state folder."""
