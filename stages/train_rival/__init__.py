"""Stage train_rival: training of the rival's hybrid."""
