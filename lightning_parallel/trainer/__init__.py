"""What stands between the machinery and Lightning's Trainer: launching, logging, signals, refusals."""
