"""S(z): calibration set, passes over it, their cost, gradients, the evaluation log."""
