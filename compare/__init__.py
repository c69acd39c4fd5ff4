"""Pair, measure, judge and locate: reads traces and arrays, never runs a model, needs no torch."""
