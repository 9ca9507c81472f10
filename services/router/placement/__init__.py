"""Where a request goes: what each place costs it and everybody else."""
