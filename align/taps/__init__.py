"""Taps that change a run: substitute, cast, shadow, perturb, clock."""
