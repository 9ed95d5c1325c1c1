"""Objectives of this library as loss modules for other libraries' trainers."""
