"""The jobs that apply to Lance tables."""
