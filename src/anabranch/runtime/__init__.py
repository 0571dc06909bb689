"""What executors run on: threads, locks and time, given to them from outside so that a simulation can give its own."""
