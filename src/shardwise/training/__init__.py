"""The loop, as a generator of Steps, and what it is made of."""
