"""Merges and reads on Spark: keys and row locators are shuffled; executors stream the payload from Lance to Lance."""
