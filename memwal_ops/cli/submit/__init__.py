"""Programs for ``spark-submit``, in a folder of their own: Python puts a program's folder before all others."""
