"""Find the guilty choice: trials (the predicate), workers, the bisection itself, what it leaves on disk, how it is told."""
