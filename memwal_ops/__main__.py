"""Run the command line as ``python -m memwal_ops``, if the console script is not on the path."""

from memwal_ops.cli.main import main

if __name__ == "__main__":
    main()
