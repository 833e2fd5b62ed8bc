#compdef pentameter
_pentameter() {
  local -a found
  found=("${(@f)$("${words[1]}" completion --words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
  local -a begun=("${(@M)found:#*.}")
  found=("${(@)found:#*.}")
  if [[ -z "$begun$found" ]]; then _files; return; fi
  compadd -S "" -a begun
  compadd -a found
}
case "${funcstack[1]}" in
  _pentameter) _pentameter ;;
  *) compdef _pentameter pentameter ;;
esac
