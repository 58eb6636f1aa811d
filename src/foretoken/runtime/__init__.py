"""Runs forward passes fast, without changing what they compute."""
