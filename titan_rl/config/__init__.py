"""What a run is asked to be. No torch here."""
