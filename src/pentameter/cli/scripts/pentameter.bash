_pentameter() {
  local IFS=$'\n' typed=("${COMP_WORDS[@]:1:COMP_CWORD}")
  COMPREPLY=($("${COMP_WORDS[0]}" completion --words "${typed[@]}" 2>/dev/null))
  [[ "${COMPREPLY[*]}" == *. ]] && compopt -o nospace
}
complete -o default -F _pentameter pentameter
