"""What stands beside `step()`: planning without a cluster, simulation, calibration, verification, tuning."""
