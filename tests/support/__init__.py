"""What tests share: models, stand-ins, real servers and running queries."""
