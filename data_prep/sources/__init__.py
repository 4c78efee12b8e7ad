"""Where samples come from: folders, tars, zips and arrays, read in place."""
