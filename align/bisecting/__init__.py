"""Find the guilty choice: trials (the predicate), workers, the search, what it leaves on disk, how it is told."""
