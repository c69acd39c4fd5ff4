"""The gate: limits and a committed budget applied to a run, and told to machines; the pytest check is the same job."""
