"""Tables of other releases of pylance and LanceDB through our jobs, and back in the hands of these releases."""
