"""What the tests stand on: mounts, real and fake, and a look at what was left behind."""
