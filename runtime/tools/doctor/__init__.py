"""What `doctor` looks at: the machine, the files, their bandwidths, and the outlook of budgets."""
