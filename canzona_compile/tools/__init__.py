"""What stands beside `step()`: planning without a cluster, calibration, verification, profiling, tuning."""
