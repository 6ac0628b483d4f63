"""The demo: two real traces replayed against a fleet, under our policy and under round-robin, and accounted for."""
