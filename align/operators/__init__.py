"""The operator catalog: one file an operator; `registry` collects them."""
