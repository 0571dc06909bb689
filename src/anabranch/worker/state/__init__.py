"""The state of a job in a worker: typed rows, the layers of the latest epochs, and what is due."""
