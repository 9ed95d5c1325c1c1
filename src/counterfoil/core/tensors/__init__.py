"""Devices, free memory, transfers between host and device, evaluation mode."""
