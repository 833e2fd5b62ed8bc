function __pentameter
  set -l found (pentameter completion --words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)
  if test -n "$found"
    string join \n -- $found
  else
    __fish_complete_path (commandline -ct)
  end
end
complete -c pentameter -f -a '(__pentameter)'
