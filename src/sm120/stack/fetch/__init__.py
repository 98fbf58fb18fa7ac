"""Wheels on this machine: downloaded, kept by their hash, mirrored."""
