"""Probes on a running model, and the trace they leave; imports torch only through its torch-facing modules."""
