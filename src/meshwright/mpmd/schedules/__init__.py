"""In: sizes and costs. Out: who runs what when, proved, timed and drawn. No device is touched."""
