"""From logical stages to physical ones: validation and explain."""
