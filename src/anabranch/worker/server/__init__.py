"""The process of a state worker: the Flight service, its jobs, and how it joins and leaves them."""
