"""Run the stages of jobs on Spark: what all formats share. PySpark is imported where it is used."""
