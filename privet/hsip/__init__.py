"""FedHSIP's assignment of coordinates to slots: its objective (eq. 12), the solver, and sketches of profiles."""
