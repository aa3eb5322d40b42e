"""Every method of Privet: one file, with its server half and its client half."""
